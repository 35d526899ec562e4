"""How near answers stay that reuse what is no prefix: texts in two halves, cases drawn from them, report."""
