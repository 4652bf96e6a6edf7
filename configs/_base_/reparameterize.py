# Tests run on the deploy form. Only for configs with a RePa backbone: the hook
# refuses a model that has nothing to merge.
custom_hooks = [dict(type='ReparameterizeHook')]
