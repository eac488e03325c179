"""DeepSpeed ZeRO-3 on this package: the `async_io` op and the swappers of parameters and optimizer states."""
