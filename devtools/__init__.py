"""Tools for those who change fedprune, used in a checkout.

No wheel and no bundle holds them, and the product imports none of them.
"""
