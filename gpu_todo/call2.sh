python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
R=$PWD; mkdir -p /tmp/trees; tar -xzf .gpu/trees.tgz -C /tmp/trees
export PYTHONUNBUFFERED=1 COLUMNS=170 GDN_COMMIT=690161a
CLI='import gdn_command,sys; sys.exit(gdn_command.main())'
S=$SECONDS; mark() { echo "== $1 at $((SECONDS-S))s"; }
PYTHONPATH=/tmp/site:$R timeout 60 python3 .gpu/stepcost.py 2>&1 | grep rows; mark stepcost
(
export CUDA_VISIBLE_DEVICES=0
cd /tmp/trees/step; export PYTHONPATH=/tmp/site:$PWD
timeout 290 python3 .gpu/step.py steps conv > /tmp/l_step 2>&1; cat /tmp/l_step | cut -c1-230; mark step
GDN_SECONDS=100 timeout 120 python3 .gpu/step.py rule loss > /tmp/l_rule 2>&1; cat /tmp/l_rule | cut -c1-230; mark rule
) &
(
export CUDA_VISIBLE_DEVICES=1
cd $R
PYTHONPATH=/tmp/site timeout 190 python3 .gpu/records.py > /tmp/l_rec 2>&1; cut -c1-200 /tmp/l_rec | tail -120; mark records
for t in main ring; do d=/tmp/trees/$t; [ $t = main ] && d=$R
 (cd $d; PYTHONPATH=/tmp/site:$d timeout 60 python3 $R/.gpu/ringk.py $t 2>&1 | grep N=); done > /tmp/l_ring; cat /tmp/l_ring; mark ring
(cd /tmp/trees/prefill; PYTHONPATH=/tmp/site:$PWD timeout 95 python3 -c "$CLI" bench --what prefill --requests 1 8 64 --json $OUT/prefill.json > /tmp/l_pre 2>&1; tail -32 /tmp/l_pre | cut -c1-200); mark prefill
touch /tmp/ringdone
) &
(
sleep 215; export CUDA_VISIBLE_DEVICES=1 PYTHONPATH=/tmp/site:$R GDN_COMMIT=3bd185c
cd $R
while [ ! -e /tmp/ringdone ] && [ $((SECONDS-S)) -lt 335 ]; do sleep 2; done
mark pilots-begin
sed -i 's/MEM_FRACTION=.1/MEM_FRACTION=.055/; s/limit=205/limit=150/; s/KILL 255/KILL 185/' .gpu/findings.sh
(bash .gpu/findings.sh A > $OUT/pilotsA 2>&1; mark A) & (bash .gpu/findings.sh C > $OUT/pilotsC 2>&1; mark C) & wait
) &
wait; cp /tmp/l_step $OUT/l_step; cp /tmp/l_rec $OUT/l_rec; mark all
