def check_installation():
    pass
