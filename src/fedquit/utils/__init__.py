# SPDX-License-Identifier: Apache-2.0
"""Names and files: what every other package uses and what knows none of them."""
