"""The optimiser steps of a run, and what survives them."""
