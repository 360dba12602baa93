"""The Krylov engine: quadrature rules, lock-step Lanczos, the locked head, eigenpairs and linear solves."""
