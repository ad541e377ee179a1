"""Tessera beside other engines on one machine: the same requests, interleaved, greedy and in full."""
