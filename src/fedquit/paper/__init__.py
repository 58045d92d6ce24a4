# SPDX-License-Identifier: Apache-2.0
"""FedQUIT's paper beside our records: every cell of its tables, every finding it states, and what it did not ask."""
