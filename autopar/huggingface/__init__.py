"""Models of Hugging Face ``transformers``: read from a checkpoint folder, and written as one."""
