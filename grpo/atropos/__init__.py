"""The Atropos protocol: wire schemas, a client, and a hub that environments take for run-api."""
