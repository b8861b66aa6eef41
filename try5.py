import itertools, torch
from tests.ranks import RankPool
from tests.ops.parallel_cases import *
if __name__=="__main__":
    for W in (1,2,4):
        with RankPool(W) as pool:
            for name in ("column","row"):
                ss=[Setting(dtype=d,sequence_parallel=sp,overlap=ov,activation=("gelu" if name=="column" else None),main_grad=mg) for d in (torch.float32,torch.bfloat16) for sp in (0,1) for ov in (0,1) for mg in (0,1)]
                ss+=[Setting(leading=(8,3)),Setting(leading=(4,1,2)),Setting(leading=(7,),sequence_parallel=False),Setting(leading=(0,),sequence_parallel=False),Setting(leading=(0,)), Setting(leading=(2,),sequence_parallel=False)]
                rs=pool.run(run_all,name,[(s,i) for i,s in enumerate(ss)])
                for i,s in enumerate(ss):
                    worst={k:max(r[i][k] for r in rs) for k in rs[0][i]}
                    bad=[k for k,v in worst.items() if not v<BOUND[s.dtype]]
                    if bad: print(W,name,s,worst)
    print("done")
