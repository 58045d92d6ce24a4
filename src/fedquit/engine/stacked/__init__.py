# SPDX-License-Identifier: Apache-2.0
"""The stacked engine: many clients in one computation. `engine` is the entry, `work` the step."""
