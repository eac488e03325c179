"""The user's DeepSpeed configuration, edited as text."""
