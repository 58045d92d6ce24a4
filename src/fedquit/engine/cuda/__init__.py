# SPDX-License-Identifier: Apache-2.0
"""The stacked engine's operations on a GPU, and the Triton kernels behind them."""
