# SPDX-License-Identifier: Apache-2.0
"""Statistical inference: what may be concluded from the numbers of an evaluation, and with which error rate.

Pure functions of numbers, without torch: `results`, `audit` and `studies` use them.
"""
