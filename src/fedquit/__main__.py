# SPDX-License-Identifier: Apache-2.0
"""`python -m fedquit`."""

from fedquit.cli import main

if __name__ == "__main__":
    main()
