"""The files of `torch.save`: zip archives and the legacy form, read into records over storages, and written."""
