"""Programmatic dependent launch for the decode chain; the functions are in :mod:`lldecode_pdl.op`."""
