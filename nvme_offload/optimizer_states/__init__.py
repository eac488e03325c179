"""`FORMATS`: how the optimizer states of a bucket of parameters are packed on the drive. The
package computes on tensors and transfers no data.
"""
