# SPDX-License-Identifier: Apache-2.0
"""A closed federation: what the network reaches is the fleet service alone, through mutual TLS.

- `authority`, `requests`: the project's authority, and the request by which a site asks for a certificate.
- `sites`, `project`: the list of sites, and the operator's commands on it (init, enrol, rotate, revoke, sign).
- `site_folder`: what lies at a site: its keys, which never leave it, and the bundle that the operator sent.
- `rules`, `front`: what a site may ask for, and the server that passes only that on to the SuperLink.
- `supernode`, `pair`: a SuperNode that shows its certificate, and the process that runs apps beside it.
- `service`: what `fedquit flower serve --project` and `fedquit flower node --site` run.
"""
