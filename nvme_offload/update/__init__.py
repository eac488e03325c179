"""Updates that both front ends make in the same way."""
