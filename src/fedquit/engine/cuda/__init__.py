# SPDX-License-Identifier: Apache-2.0
"""The stacked engine's operations on a GPU: `ops` replaces torch's, and the `triton_*` modules are the kernels."""
