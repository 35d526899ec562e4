"""A pool across machines: a process beside the daemon (fabric) that keeps blocks in Mooncake and finds its
companions in etcd, and what starts and watches it (sidecar). The daemon sees a peer on loopback: what it gets
from there is verified as from any other, and a fabric that dies, hangs or lies costs hits.
"""
