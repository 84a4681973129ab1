"""NumPy float64 references written for the tests, without any of the project's code."""

import numpy as np

A_OUT = 1.5095585584640503
A_IN = A_OUT / 3
T0 = 0.9810652732849121


def standardise(z, group=128):
    """(x, mean, sigma) of z [..., d] by groups, x as [..., d/G, G]."""
    z = np.asarray(z, np.float64)
    groups = z.reshape(*z.shape[:-1], z.shape[-1] // group, group)
    mean = groups.mean(-1, keepdims=True)
    sigma = np.sqrt(((groups - mean) ** 2).mean(-1, keepdims=True) + 1e-8)
    return (groups - mean) / sigma, mean, sigma


def four_level(z, threshold, gain, group=128):
    """(codes, z_hat) of the group-normalised four-level quantizer."""
    x, mean, sigma = standardise(z, group)
    codes = (x >= -threshold).astype(int) + (x >= 0) + (x >= threshold)
    levels = np.array([-A_OUT, -A_IN, A_IN, A_OUT])[codes]
    return codes.reshape(np.shape(z)), (mean + sigma * gain * levels).reshape(np.shape(z))


def sylvester(n):
    """Normalised Hadamard matrix by Kronecker products."""
    h = np.ones((1, 1))
    while h.shape[0] < n:
        h = np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), h)
    return h / np.sqrt(n)


def expm_skew(s):
    """exp of a real skew-symmetric matrix through the Hermitian eigenproblem of -iS."""
    values, vectors = np.linalg.eigh(-1j * s)
    return ((vectors * np.exp(1j * values)) @ vectors.conj().T).real
