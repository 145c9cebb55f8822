# Runs in the container of a node: LOCK GPUS FLOOR CUDA CHECK REDUCE NODES ADDRESS PORT COMMAND...
if [ -f /opt/envbuild/cuda-compat.sh ]; then . /opt/envbuild/cuda-compat.sh; fi
set -eu
python3 -c "$5" "$1" "$2" "$3" "$4"
limit=$(ulimit -H -l)
ulimit -S -l "$limit" 2>/dev/null || :
ulimit -S -s 65536 2>/dev/null || :
ulimit -S -c 0
if [ -d /dev/infiniband ] && [ "$limit" != unlimited ]; then
    echo "envbuild: $(uname -n): locked memory is limited to $limit KiB: RDMA can fail to register memory" >&2
fi
ranks=$2 reduce=$6 nodes=$7 address=$8 port=$9
shift 9
if [ "$ranks" -eq 0 ]; then ranks=1; fi
if [ $# -eq 0 ]; then set -- python3 -c "$reduce"; fi
case $1 in
*.py | -m) ;;
*) set -- --no-python "$@" ;;
esac
exec torchrun --nnodes="$nodes" --nproc-per-node="$ranks" --node-rank="$SLURM_NODEID" \
    --master-addr="$address" --master-port="$port" "$@"
