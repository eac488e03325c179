"""Values of a tier on the device that uses them, copied while a GPU computes."""
