// Check the search of the built pages: `node docs/check_search.js docs/_build/html`.
// It runs Sphinx's own search code; each query must find one of its pages.

const fs = require("fs");
const path = require("path");
const vm = require("vm");

const QUERIES = {
  "uneven all_gather": ["how_to/gather", "generated/tutorials/01"],
  "all gather different sizes": ["how_to/gather", "generated/tutorials/01"],
  "halo exchange": "generated/tutorials/02",
  "halo": "generated/tutorials/02",
  "ghost": "how_to/exchange_ghost_cells",
  "ghost cells": "how_to/exchange_ghost_cells",
  "DDP last batch": "how_to/uneven_last_batch_ddp",
  "DDP": "how_to/uneven_last_batch_ddp",
  "NCCL hang": "how_to/find_the_rank_that_hangs",
  "hang": "how_to/find_the_rank_that_hangs",
  "deadlock": "how_to/find_the_rank_that_hangs",
  "graph too large": "how_to/train_graph_too_large",
  "partition mesh": "meshes",
  "METIS": "how_to/choose_a_partitioner",
  "forces gradient": "how_to/train_on_forces",
  "second derivative": "how_to/train_on_forces",
  "tensor parallel heads not divisible": "how_to/shard_uneven_heads",
  "vocab parallel": "tensor_parallel",
  "checkpoint different number of GPUs": ["how_to/resume", "checkpoints"],
  "torchrun": "start",
  "SLURM": "how_to/run_on_slurm",
  "MPI": "how_to/run_with_mpi",
  "DTensor": "how_to/use_device_mesh",
  "torch.compile": "how_to/compile_a_model",
  "PyTorch Geometric multi GPU": "how_to/train_graph_too_large",
  "full graph training": "how_to/train_graph_too_large",
  "NeighborLoader": "how_to/train_on_sampled_mini_batches",
  "mini-batch": "how_to/train_on_sampled_mini_batches",
  "DistDGL": "how_to/train_on_sampled_mini_batches",
  "distributed sampling": "how_to/train_on_sampled_mini_batches",
  "mesh": "meshes",
  "VTK": "meshes",
  "OpenFOAM": ["how_to/read_openfoam", "meshes"],
  "sharded optimizer": ["how_to/shard_optimizer", "gradients"],
  "bitwise": "how_to/reproduce_bit_by_bit",
  "loss differs": "troubleshooting/loss_differs",
  "error message": "troubleshooting/errors",
  "all_reduce op": "how_to/compute_an_exact_metric",
  "ReduceOp.MAX": "how_to/compute_an_exact_metric",
  "edge mask": "graphs",
  "node type without nodes": "graphs",
  "SyncBatchNorm CPU": "how_to/uneven_last_batch_ddp",
  "BatchNorm uneven batch": "how_to/uneven_last_batch_ddp",
  "DDP join": "how_to/uneven_last_batch_ddp",
  "detections per image": "how_to/gather_different_lengths",
  "list of dicts": "how_to/gather_different_lengths",
  "latitude longitude": "how_to/read_only_the_rows",
  "scale_factor": "how_to/read_only_the_rows",
  "FSDP": ["why", "faq", "dtensor"],
  "CUDA": "install",
  "conda": "install",
  "windows": "install",
  "scatter": "reference/collectives",
  "multi-GPU": ["why", "how_to/train_graph_too_large"],
  "all_gather variable length": "how_to/gather",
  "variable size": "how_to/gather",
  "mixed precision": "how_to/train_with_mixed_precision",
  "cite": "faq",
  "FAQ": "faq",
  "why": "why",
  "comparison": "why",
  "CUDA-aware MPI": ["faq", "coming_from/mpi4py"],
  "allgatherv": "coming_from/mpi4py",
  "DGL": "coming_from/pyg",
  "heterogeneous graph": "graphs",
  "accuracy": "how_to/evaluate",
  "SPMD": "how_to/train_graph_too_large",
  "one graph on several GPUs": "how_to/train_graph_too_large",
  "balance": "how_to/choose_a_partitioner",
  "resplit": "moving_graphs",
};

const nothing = new Proxy(function () {}, {
  get: (_, name) => (name === Symbol.toPrimitive ? () => "" : nothing),
  apply: () => nothing,
});
const page = { addEventListener() {}, getElementById: () => null, readyState: "loading" };
const browser = vm.createContext({
  document: page,
  addEventListener() {},
  localStorage: nothing,
  DOCUMENTATION_OPTIONS: nothing,
  SPHINX_HIGHLIGHT_ENABLED: false,
  _: (text) => text,
  _ready() {},
  console,
});
vm.runInContext("var window = globalThis", browser);
const folder = process.argv[2];
for (const name of ["_static/language_data.js", "_static/searchtools.js", "searchindex.js"]) {
  vm.runInContext(fs.readFileSync(path.join(folder, name), "utf8"), browser, { filename: name });
}

let wrong = 0;
for (const [query, expected] of Object.entries(QUERIES)) {
  browser.query = query;
  const found = vm.runInContext("Search._performSearch(...Search._parseQuery(query))", browser);
  const pages = found.reverse().map((result) => result[0]);
  if ([expected].flat().some((page) => pages.some((hit) => hit.startsWith(page)))) continue;
  wrong += 1;
  console.error(`${query}: expected ${expected}, found ${pages.slice(0, 3).join(", ")}`);
}
console.log(`search: ${Object.keys(QUERIES).length - wrong} pages found, ${wrong} missing`);
process.exit(wrong ? 1 : 0);
