# cuda-compat for CUDA @cuda@. Whatever starts a process of this image reads this file first: `. /opt/envbuild/cuda-compat.sh`.
# The newer libcuda of @folder@ comes before the host's where the host's driver is of one of the branches
# @branches@, and so older than CUDA @cuda@ needs (@floor@), and no GPU is a GeForce or workstation board. Elsewhere nothing
# changes. ENVBUILD_CUDA_COMPAT=on or =off decides it whatever the host has; ENVBUILD_CUDA_COMPAT_STATE says what was done.
envbuild_compat=@folder@
envbuild_state=off
envbuild_driver=
envbuild_board=
envbuild_line=
if [ -r /proc/driver/nvidia/version ]; then
    # NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023
    read -r envbuild_line </proc/driver/nvidia/version || :
fi
while [ -n "$envbuild_line" ]; do
    envbuild_word=${envbuild_line%%[ 	]*}
    case $envbuild_word in
    *[!0-9.]*) ;;
    [1-9]*.*)
        envbuild_driver=$envbuild_word
        break
        ;;
    esac
    case $envbuild_line in
    *[" 	"]*) envbuild_line=${envbuild_line#*[ 	]} ;;
    *) envbuild_line= ;;
    esac
done
if [ -z "$envbuild_driver" ]; then
    # no such file where /proc is masked: the driver's libcuda, which the container toolkit or Apptainer hands in
    for envbuild_word in /.singularity.d/libs/libcuda.so.*.* /usr/lib/*-linux-gnu/libcuda.so.*.* /usr/lib64/libcuda.so.*.* /usr/local/nvidia/lib64/libcuda.so.*.*; do
        if [ -e "$envbuild_word" ]; then
            envbuild_driver=${envbuild_word##*/libcuda.so.}
            break
        fi
    done
fi
for envbuild_word in /proc/driver/nvidia/gpus/*/information; do
    if [ -r "$envbuild_word" ]; then
        while read -r envbuild_line envbuild_model; do
            case $envbuild_line$envbuild_model in
            Model:*"Server Edition"*) ;;
            Model:*GeForce* | Model:*TITAN* | Model:*Quadro* | Model:*NVS* | Model:*RTX* | Model:*" T"[0-9][0-9][0-9]*)
                envbuild_board=$envbuild_model
                ;;
            esac
        done <"$envbuild_word"
    fi
done
case ${ENVBUILD_CUDA_COMPAT-}:$envbuild_driver in
on:*) envbuild_state="on: asked for" ;;
off:*) envbuild_state="off: asked for" ;;
*:) envbuild_state="off: no driver of the host is seen" ;;
*)
    case " @branches@ " in
    *" ${envbuild_driver%%.*} "*) envbuild_state="on: the host's driver is $envbuild_driver" ;;
    *) envbuild_state="off: the host's driver is $envbuild_driver" ;;
    esac
    if [ -n "$envbuild_board" ]; then envbuild_state="off: $envbuild_board is no data-center GPU"; fi
    ;;
esac
case $envbuild_state in
on*)
    case :${LD_LIBRARY_PATH-}: in
    *":$envbuild_compat:"*) ;;
    *) export LD_LIBRARY_PATH="$envbuild_compat${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" ;;
    esac
    # LD_LIBRARY_PATH of the image names this link: what joins the container later (docker exec) finds it there
    if [ ! -L /opt/envbuild/compat ]; then ln -s "$envbuild_compat" /opt/envbuild/compat 2>/dev/null || :; fi
    ;;
*)
    if [ -L /opt/envbuild/compat ]; then rm -f /opt/envbuild/compat 2>/dev/null || :; fi
    ;;
esac
export ENVBUILD_CUDA_COMPAT_STATE="$envbuild_state"
unset envbuild_compat envbuild_state envbuild_driver envbuild_board envbuild_line envbuild_word envbuild_model
