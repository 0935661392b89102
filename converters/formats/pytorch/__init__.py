"""The files of `torch.save`: zip archives and the legacy form, storages, records."""
