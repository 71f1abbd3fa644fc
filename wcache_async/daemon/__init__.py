"""The process that holds states: what it holds, who leases it, and how it answers."""
