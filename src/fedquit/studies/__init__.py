# SPDX-License-Identifier: Apache-2.0
"""Many runs: a sweep over rates, a comparison of methods, many models of one procedure, worker processes."""
