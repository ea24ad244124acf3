class ProgressDisplay:
    def __init__(self,total_steps,enabled): self.enabled=enabled
    def __enter__(self): return self
    def __exit__(self,*a): pass
    def phase(self,n): pass
    def step(self,s,m):
        if self.enabled: print(s,{k:round(v,4) for k,v in m.items()},flush=True)
