"""`TensorStore`: named tensors on drives."""
