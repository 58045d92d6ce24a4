# SPDX-License-Identifier: Apache-2.0
"""A Flower app whose clients can ask to be forgotten."""
