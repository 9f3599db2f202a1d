# The only wire definition of kvq: what goes over the daemon's Unix socket.
#
# Invariant: one capability carries at most one descriptor and one message at most one such capability, so that a peer's
# limit of one descriptor per message never drops any. Hot paths use the session segment (segment.h), not these calls.
# Outcomes a caller acts on are in `Status`; an exception means a broken peer.
@0xd1b7e6a3c05f4b21;

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("kvq::wire");

struct Status {
  code @0 :Int32;      # Errc of result.h; 0 = ok
  message @1 :Text;    # names the value and the fix
  native @2 :Int32;    # errno or driver code
}

struct Layer {
  kvHeads @0 :UInt16;
  headDim @1 :UInt16;
  dtype @2 :UInt8;      # Dtype
  keepDense @3 :Bool;
}

enum Role {
  both @0;              # one process schedules and computes
  control @1;           # schedules: opens, reserves, commits, releases; maps no slab
  data @2;              # computes: appends, attends, steps
}

struct Registration {
  contractVersion @0 :UInt32;
  role @1 :Role;
  label @2 :Text;             # shown by kvqctl, e.g. "vllm worker 0"
  layers @3 :List(Layer);
  fingerprint @4 :Data;       # 32 bytes: digest over weights, RoPE parameters, everything that changes K/V
  pageTokens @5 :UInt32;
  formatFloorDense @6 :Bool;  # this session's pages are never quantized
  credits @7 :UInt32;         # pages to keep in the magazine
  slabs @8 :SlabSink;         # null for the control role
  # Takes up a session that an earlier daemon left to this one, in place of making one. 0: a new session. All other fields
  # are as they were at its registration. Errors: staleId (no such session waits for its client), permissionDenied (the
  # token, the user or the process is another).
  resumeSession @9 :UInt32;
  resumeToken @10 :Data;      # 16 bytes: SegmentHeader.token of the session
  # UUID of the GPU ("GPU-..." or "MIG-...") on which the kernels will run, "host", or empty where the daemon serves one device.
  # Never an ordinal: CUDA_VISIBLE_DEVICES may differ on the two sides. Error: invalidArgument, naming what there is.
  device @11 :Text;
}

interface Memory {}           # its descriptor is a memfd, or an eventfd for doorbells; dropping it drops the import

# Implemented by the client. A reply is the acknowledgement that the slab is mapped (or no longer mapped).
interface SlabSink {
  # serial names the memory: another one at the same place is another slab, and replaces what is mapped there. Device
  # memory comes as a descriptor of a physical allocation, or, where that cannot pass, as a handle file (docs/protocol.md).
  map @0 (slab :UInt32, writable :Bool, memory :Memory, serial :UInt64) -> ();
  unmap @1 (slab :UInt32) -> ();
}

# The bootstrap capability: one object per peer, made from the peer's credentials.
interface Node {
  register @0 (request :Registration) -> (status :Status, session :Session, info :SessionInfo);
  admin @1 () -> (status :Status, admin :Admin);    # admin group or root only
  devices @2 () -> (devices :List(Text));           # served here: "host", or UUIDs of GPUs
}

struct SessionInfo {
  session @0 :UInt32;
  tenant @1 :UInt32;
  tenantName @2 :Text;
  salt @3 :Data;              # 32 bytes, secret to the tenant
  arenaBytes @4 :UInt64;      # addresses to reserve: slab i at i * slabBytes, however large the arena is now
  slabBytes @5 :UInt64;
  daemonInstance @6 :UInt64;  # random per arena; processes share one mapping per (instance, tenant)
  coldFormat @7 :UInt8;       # Format the daemon quantizes to
  device @8 :Text;            # "host" or "cuda"
  deviceUuid @9 :Text;        # of the GPU that holds the pages; empty on the host
  # Bytes of the mirror: the directory's entries (from entry 0, no header) in the device's memory; 0 where there is none.
  mirrorBytes @10 :UInt64;
}

interface Session {
  directory @0 () -> (memory :Memory);       # read-only
  prefixTable @1 () -> (memory :Memory);     # read-only
  segment @2 () -> (memory :Memory);         # read-write
  doorbell @3 () -> (memory :Memory);        # eventfd: client -> daemon "look at my rings now"
  notice @4 () -> (memory :Memory);          # eventfd: daemon -> client "pressure words or magazine changed"
  ready @5 () -> (status :Status);           # returns once every slab of the tenant is mapped by this session
  # Waits until the magazine holds `pages` unused pages, at most `deadlineMs`.
  credits @6 (pages :UInt32, deadlineMs :UInt32) -> (status :Status, granted :UInt32);
  # A new running sequence that holds the `pages` pages of the chain that ends in `lastPage`, whose key is `key`.
  attach @7 (sequence :UInt32, lastPage :UInt32, generation :UInt16, pages :UInt32, key :Data, formatFloorDense :Bool)
      -> (status :Status, pages :List(UInt32));
  # A parked sequence runs again; waits for room at most `deadlineMs`.
  resume @8 (sequence :UInt32, deadlineMs :UInt32) -> (status :Status);
  # Pages of this session lost since count `since` (DaemonWords.lost_pages), with the sequences that hold them.
  lostPages @9 (since :UInt64) -> (status :Status, pages :List(UInt32), sequences :List(UInt32), now :UInt64);
  ping @10 () -> ();
  # The mirror, to be imported read-only; once `ready` has returned.
  mirror @11 () -> (memory :Memory);
}

# Replies are JSON documents (docs/kvqctl.md lists the fields), so that kvqctl --json and its tables show the same.
interface Admin {
  status @0 () -> (json :Text);
  sessions @1 () -> (json :Text);
  tenants @2 () -> (json :Text);
  # device (empty: all): as in Registration.
  pages @3 (tenant :Text, limit :UInt32, device :Text) -> (status :Status, json :Text);
  # Quantizes pages of `tenant` (empty: all) that nobody used for `idleMs`. dryRun: only says what it would do.
  quantize @4 (tenant :Text, idleMs :UInt64, dryRun :Bool) -> (status :Status, json :Text);
  # key: quantize_at, evict_at, refuse_at, relief, or quota.TENANT, share.TENANT. value: as in the config file.
  # dryRun: only checks the value. saved: it stands in the configuration file now, too, so it is what is configured.
  set @5 (key :Text, value :Text, dryRun :Bool, saved :Bool) -> (status :Status, json :Text);
  # Admits nothing new and returns once every session has ended or after `deadlineMs`; the daemon then exits with 0.
  drain @6 (deadlineMs :UInt32) -> (status :Status, json :Text);
  # Ends a session whatever its process does: its sequences and credits go at once, its slots when its steps are over.
  # kill: sends SIGKILL to its process, too (through the pidfd, so never to another one of that number).
  evictSession @7 (session :UInt32, kill :Bool) -> (status :Status, json :Text);
  # Compares every sealed page of `tenant` (empty: all) with its checksum; returns when all are done or at `deadlineMs`.
  verify @8 (tenant :Text, deadlineMs :UInt32) -> (status :Status, json :Text);
  # The newest `limit` of the last events that are numbered above `after`.
  events @9 (after :UInt64, limit :UInt32) -> (json :Text);
  # Sequences of `tenant` (empty: all) and of `session` (0: all), at most `limit`.
  sequences @10 (tenant :Text, session :UInt32, limit :UInt32, device :Text) -> (status :Status, json :Text);
  # The prefix index: its sums, and at most `limit` cached chains, the longest unused first.
  prefix @11 (tenant :Text, limit :UInt32, device :Text) -> (status :Status, json :Text);
  # Drops cached pages of `tenant` (empty: all) that nobody holds and nobody used for `idleMs`.
  evict @12 (tenant :Text, idleMs :UInt64, dryRun :Bool) -> (status :Status, json :Text);
  # Moves pages out of slabs that are partly empty, so that slabs of `tenant` (empty: all) become free.
  compact @13 (tenant :Text, dryRun :Bool) -> (status :Status, json :Text);
  # Changes the arena of a device (empty: all) while it serves; a smaller one is reached as its slabs become free.
  resize @14 (arenaBytes :UInt64, device :Text, dryRun :Bool) -> (status :Status, json :Text);
}
