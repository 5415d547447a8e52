#!/bin/busybox sh
# The guest's first program, out of the initrd: mounts the host's file system read-only, throws an overlay over it
# that keeps what is written in memory, and goes on in it with serve.sh. /share is the one folder that both sides write.
box=/bin/busybox
give_up() { echo "guest: $1 failed" > /dev/console; $box poweroff -f; }

$box mount -t proc proc /proc
$box mount -t sysfs sysfs /sys
$box mount -t devtmpfs dev /dev
while read -r module; do $box insmod "/modules/$module" || give_up "module $module"; done < /modules/order
for word in $($box cat /proc/cmdline); do
  case $word in guest.*) eval "${word#guest.}" ;; esac
done

options=trans=virtio,version=9p2000.L
$box mount -t 9p -o ro,$options,msize=524288,cache=loose host /host || give_up "mount of the host's files"
$box mount -t tmpfs -o size=1g tmpfs /writes
$box mkdir /writes/upper /writes/work
$box mount -t overlay -o lowerdir=/host,upperdir=/writes/upper,workdir=/writes/work overlay /root || give_up "overlay"

cd /root
$box mkdir -p share usr/lib/modules
$box mount -t 9p -o rw,$options,msize=262144,cache=none share share || give_up "mount of the shared folder"

# What the mounts below would cover and the host's side names in /share/folders, such as a checkout in /tmp, comes back
# on top of them.
count=0
while IFS= read -r folder; do
  count=$((count + 1))
  $box mkdir -p /kept/$count && $box mount --bind "/root$folder" /kept/$count || give_up "keeping $folder"
done < share/folders

$box mount -t proc proc proc
$box mount -t sysfs sysfs sys
$box mount -t devtmpfs dev dev
$box mkdir -p dev/shm dev/pts
$box mount -t tmpfs -o mode=1777 shm dev/shm
$box mount -t devpts pts dev/pts
$box mount -t tmpfs -o mode=755 run run
$box mount -t tmpfs -o mode=1777 tmp tmp
count=0
while IFS= read -r folder; do
  count=$((count + 1))
  $box mkdir -p "/root$folder" && $box mount --bind /kept/$count "/root$folder" || give_up "bind of $folder"
done < share/folders
$box mount --bind "/root$modules" usr/lib/modules || give_up "bind of $modules"
$box ln -sf /proc/self/fd/0 dev/stdin
$box ln -sf /proc/self/fd/1 dev/stdout
$box ln -sf /proc/self/fd/2 dev/stderr
$box ln -sf /proc/self/fd dev/fd
$box ip link set lo up
exec $box switch_root /root /bin/bash /share/serve.sh < /dev/null
