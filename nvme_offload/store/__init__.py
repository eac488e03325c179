"""Named tensors on drives: `TensorStore`."""
