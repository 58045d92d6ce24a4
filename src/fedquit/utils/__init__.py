# SPDX-License-Identifier: Apache-2.0
"""Names, files, lazy exports and deprecated names: what every other package uses and what imports none of them."""
