#!/bin/bash
# Fetches what the virtual machine is made of into $CKDIST_VM: Debian's stock kernel and an initrd of busybox and
# a few modules.
# Needs root and Debian 12 or a relative with apt; nothing is installed as a boot kernel. Run again, it does nothing.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$CKDIST_VM" && cd "$CKDIST_VM"
[ -e ready ] && [ ready -nt "$here/init.sh" ] && [ ready -nt "$here/prepare.sh" ] && exit 0

packages="qemu-system-x86 busybox-static cpio kmod iproute2 rdma-core ibverbs-utils ibverbs-providers"
packages="$packages numactl python3-pyverbs"
export DEBIAN_FRONTEND=noninteractive
if ! dpkg -s $packages libibverbs-dev >/dev/null 2>&1; then
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends $packages libibverbs-dev >/dev/null
fi

if [ ! -d kernel/lib/modules ]; then
  image=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image/ {print $2; exit}')
  apt-get download -qq "$image" 2>/dev/null
  dpkg -x "$image"_*.deb kernel && rm "$image"_*.deb
fi
version=$(ls kernel/lib/modules)
depmod -b kernel "$version"

rm -rf initrd && mkdir -p initrd/{bin,modules,proc,sys,dev,host,writes,root}
cp /bin/busybox initrd/bin/
cp "$here/init.sh" initrd/init && chmod +x initrd/init
for module in virtio_pci virtio_rng 9p 9pnet_virtio overlay; do
  modprobe -d kernel -S "$version" --show-depends $module | awk '$1 == "insmod" {print $2}'
done | awk '!seen[$0]++' | while read -r file; do
  cp "$file" initrd/modules/
  basename "$file" >> initrd/modules/order
done
(cd initrd && find . | cpio -o -H newc --quiet | gzip -1) > initrd.gz
cp "kernel/boot/vmlinuz-$version" vmlinuz
touch ready
