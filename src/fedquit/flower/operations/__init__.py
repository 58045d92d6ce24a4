# SPDX-License-Identifier: Apache-2.0
"""What an operator sees and sets up: status, metrics, the doctor, units.

Status and doctor read files, and what the kernel tells of ports and locks: they disturb no server, and need none.

- `observed`: who listens on a port, who holds a lock, how full a disk is.
- `status`, `metrics`: where a federation stands, for people and for Prometheus.
- `findings`, `server_doctor`, `site_doctor`: what is wrong with a federation or a site, and what to do next.
- `parts`, `units`: the processes of a server and of a site one by one, and the systemd units that run them.
"""
