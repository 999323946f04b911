"""Process layout: topology, groups, parameter specs and parallel layers."""
