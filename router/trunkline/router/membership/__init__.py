"""Which groups there are: the sources from which a router learns who has come and who has gone.

static file, record store, DNS, Kubernetes ──► MemberSource.follow ──► Present ──► changes ──► links
                        ▲
                   Registrar, which runs beside each group
"""
