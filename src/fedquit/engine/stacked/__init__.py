# SPDX-License-Identifier: Apache-2.0
"""Many clients in one computation."""
