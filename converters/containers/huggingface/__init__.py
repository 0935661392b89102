"""Folders of Hugging Face's libraries: Trainer's, Accelerate's, and a model in safetensors."""
