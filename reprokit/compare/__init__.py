"""A step beside another run of it: another dtype, device, compiler, or a healthy step. The first call that differs."""
