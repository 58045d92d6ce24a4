# SPDX-License-Identifier: Apache-2.0
"""Names, files, lazy exports and deprecated names; imports no other package."""
