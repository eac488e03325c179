"""What a training will take of a machine: memory, bytes moved and seconds, before it starts."""
