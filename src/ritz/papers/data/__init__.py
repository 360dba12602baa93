"""The data sets of the papers, as their official files hold them."""
