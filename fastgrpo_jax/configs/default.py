"""Every configuration key, with its unit or reason. Other configs start from here."""

from ml_collections import config_dict


def get_config() -> config_dict.ConfigDict:
    c = config_dict.ConfigDict()
    c.seed = 0  # everything random derives from it: weights, data order, sampling noise
    c.steps = 100  # training steps, one rollout each
    c.compilation_cache = "~/.cache/fastgrpo_jax"  # folder of compiled programs; empty: none

    c.model = config_dict.ConfigDict()
    c.model.name = "tiny"  # tiny | smollm2-135m | directory | .gguf file | hub id
    c.model.dtype = "float32"  # compute dtype: float32 | bfloat16 | float64; masters stay float32
    # auto (fused on a TPU or GPU where that saves memory traffic) | xla | fused (a Pallas kernel)
    c.model.attention = "auto"

    # Devices, data x fsdp x tensor = all of them; -1 (once): the rest. One device: no mesh. A run
    # may go on with another mesh; tokens are the same under all. See docs/sharding.md.
    c.mesh = config_dict.ConfigDict()
    c.mesh.data = -1  # rows are cut along it; weights are whole on each
    c.mesh.fsdp = 1  # rows too, and weights and moments in training; divides the model's hidden
    c.mesh.tensor = 1  # heads, feed-forward and vocabulary are cut along it; divides each of them

    # Several processes, one for each host, all started by the same command. See docs/hosts.md.
    c.hosts = config_dict.ConfigDict()
    # HOST:PORT of process 0 | auto (a TPU pod, Slurm, Open MPI, Kubernetes) | empty: one process,
    # or what JAX_COORDINATOR_ADDRESS says
    c.hosts.coordinator = ""
    c.hosts.count = 0  # processes; 0: what JAX_NUM_PROCESSES says
    c.hosts.index = -1  # of this process, from 0; -1: what JAX_PROCESS_ID says
    c.hosts.timeout_s = 60  # one that is silent for so many seconds ends the run

    c.task = config_dict.ConfigDict()
    c.task.name = "addition"  # addition | arithmetic | FILE.jsonl | datasets:NAME[:SPLIT]
    c.task.max_operand = 20  # addition, arithmetic: numbers from 1 (addition) to this
    c.task.max_terms = 5  # arithmetic: longest chain of operations
    c.task.system = ""  # system message; empty leaves the chat template's own default
    c.task.chat = True  # render text prompts as one user message by the tokenizer's template
    c.task.prompts_per_step = 4  # P: distinct prompts of a step
    c.task.group = 8  # G: completions per prompt, at least 2
    # Most extra rollouts of a step, whose groups replace those without a difference in rewards
    # (DAPO's dynamic sampling); 0: off.
    c.task.resample_max = 0
    c.task.max_prompt_length = 128  # tokens, template included
    c.task.overlong_prompt = "error"  # error | drop | truncate_left
    c.task.shuffle = True  # reshuffle each epoch (finite sources)

    c.reward = config_dict.ConfigDict()
    # Names (exact_number, format) or module:function or FILE.py:function, comma-separated.
    c.reward.functions = "exact_number"
    c.reward.weights = ""  # comma-separated, one per function; empty: all 1
    # DAPO's soft penalty: 0 to -1 over the last so many tokens before the limit; 0: off.
    c.reward.overlong_buffer = 0
    c.reward.overlong_factor = 1.0  # weight of that penalty in the reward
    c.reward.on_error = "raise"  # raise | none: what a reward that fails does to its row

    c.sampling = config_dict.ConfigDict()
    c.sampling.temperature = 1.0  # 0 is greedy
    c.sampling.top_k = 0  # 0: off
    c.sampling.top_p = 1.0  # 1: off
    c.sampling.max_response_length = 64  # tokens, the stop token included
    c.sampling.max_length = 0  # tokens, prompt included; 0: prompt limit + response limit
    c.sampling.stop_tokens = ""  # further stop tokens, comma-separated texts or ids

    c.rollout = config_dict.ConfigDict()
    c.rollout.controller = "goodput"  # off | fixed | fastgrpo | beg_mab | goodput
    # goodput, beg_mab: what they choose from beside off, comma-separated drafter:depth:width:nodes;
    # empty: what the cost table says can pay, learned and n-gram.
    c.rollout.strategies = ""
    c.rollout.explore = 0.02  # goodput: share of the time that trying other choices may cost
    c.rollout.timing = "live"  # live | frozen: costs from the start's table alone, exact resume
    c.rollout.measure_seconds = 60.0  # of the cost table at start; kept in compilation_cache
    # of `fixed`: drafter:depth:width:nodes, or a chain of which the rows share so many nodes each
    # on average, drafter:depth:1:nodes@share
    c.rollout.strategy = "learned:2:1:3"
    c.rollout.draft_noise = "shared"  # shared | off (the papers' deterministic EAGLE-2 tree)
    # draws (the target's own, plain decoding's tokens) | rejection (usual speculative sampling, to
    # compare with: chains only; the distribution is the target's, the tokens are the drafter's)
    c.rollout.verify = "draws"
    c.rollout.draft_tau = 1.0  # temperature of a node's estimated acceptance
    c.rollout.c_peak = 0  # tokens per forward at a device's knee; 0: measured at start
    c.rollout.n_max = 160  # fastgrpo: most tokens verified per row
    c.rollout.depth_max = 5  # fastgrpo: deepest draft
    c.rollout.width_max = 8  # fastgrpo: most children per node
    c.rollout.alpha = 0.75  # fastgrpo: depth = log2(tokens verified / alpha)
    # Response tokens that a step adds to a row at most; a group that is not done goes on in the
    # next step, by the policy as it is then (partial rollouts, with A-3PO's loss); 0: no limit.
    c.rollout.segment = 0
    c.rollout.max_rows = 0  # rows decoded at one time, the others wait for a seat; 0: all
    # compiled row counts, comma-separated; empty: powers of 2. Rounded up to what devices can cut.
    c.rollout.row_buckets = ""
    c.rollout.slot_step = 128  # cache slots grow by this many positions
    c.rollout.block_rounds = 16  # rounds per compiled block before the host looks again
    c.rollout.warmup = 0  # threads that compile all decode blocks at start; 0: each when it is met
    c.rollout.max_programs = 256  # compiled programs kept; the least recently used give way
    c.rollout.prefill_chunk = 32  # tokens of the one canonical prefill shape
    c.rollout.ngram_max = 5  # longest suffix matched by the n-gram drafter
    c.rollout.ngram_earlier = 8  # newest earlier answers to a prompt that it also looks in; 0: none
    c.rollout.ngram_memory = 500_000  # tokens of earlier answers kept, of all prompts

    c.drafter = config_dict.ConfigDict()
    c.drafter.kind = "fastgrpo"  # fastgrpo | eagle | none
    # Depths of the policy that it reads: 1 (the last) | 3 (EAGLE-3; wants unroll 2 or more)
    c.drafter.features = 1
    # It learns from kept sequences on devices that a rollout's last rows leave idle (mesh.data 2
    # or more, one process), once so many rows or fewer are left for each device that goes on.
    c.drafter.spot = True
    c.drafter.spot_rows = 1
    # To start from: FILE.safetensors of `bench drafter`, the workdir of a run (config warmup), or
    # the directory of an EAGLE-1 or 2 drafter; empty: random.
    c.drafter.init = ""
    # Ids that it may propose, and that it is taught among: the most frequent so far; 0: all
    c.drafter.vocab = 8192
    c.drafter.optimizer = "adamw"  # adamw | muon
    c.drafter.learning_rate = 1e-3
    c.drafter.max_grad_norm = 0.5
    # Its loss and optimiser; `bench distill` found nothing better in the same time.
    c.drafter.feature_weight = 2.0  # of SmoothL1(next_feature, f); eagle's paper has 1.0
    c.drafter.token_weight = 0.1  # of the token loss
    c.drafter.token_loss = "ce"  # ce (soft cross entropy, KL's gradient) | tv | lk (KL, then TV)
    c.drafter.unroll = 1  # steps of the training-time test: drafts from its own estimates
    c.drafter.decay = 0.8  # weight of each unrolled step relative to the one before
    c.drafter.train = True
    # Further updates per step on sequences of this step and of those before, long ones first.
    c.drafter.replay_updates = 0
    c.drafter.replay_tokens = 100_000  # kept for them, prompts included

    c.loss = config_dict.ConfigDict()
    # grpo (sequence mean) | dapo, bnpo (token mean) | dr_grpo (over a constant length)
    # | gspo (ratio of the sequence; its paper clips at 3e-4 and 4e-4)
    # | cispo (clipped ratio as a weight; clip_low=1 clips above alone, as TRL)
    c.loss.name = "grpo"
    # With one update per rollout every ratio is 1: clipping acts on stale rows alone.
    c.loss.clip_low = 0.2
    c.loss.clip_high = 0.2
    c.loss.kl_beta = 0.0  # weight of the KL to the reference policy; 0 keeps none in memory
    # k3 (GRPO's) | k2 (its gradient is the divergence's own) | k1 (no gradient in expectation)
    c.loss.kl_estimator = "k3"
    c.loss.reference_sync_every = 0  # steps between its moves towards the policy; 0: it stays
    c.loss.reference_sync_alpha = 0.6  # share of the policy in such a move; 1 copies it
    c.loss.mask_truncated = False  # leave completions that the length limit cut out of the loss
    # Tokens weigh min(trainer / rollout probability, cap) (gspo: of the sequence's geometric
    # mean): for a rollout in another precision. 1 or more; TRL has 2; 0: off.
    c.loss.importance_cap = 0.0
    c.loss.advantage_scale = "group"  # group | batch | none
    c.loss.head_chunk = 256  # tokens whose logits exist at one time

    c.lora = config_dict.ConfigDict()
    c.lora.rank = 0  # of the adapters that are trained in place of the policy's weights; 0: off
    c.lora.alpha = 32.0  # they are scaled by alpha / rank
    c.lora.targets = "q,k,v,o,gate,up,down"  # projections that have one

    c.optim = config_dict.ConfigDict()
    # adamw | muon (matrices but embedding and head: orthogonal updates, no moment of squares)
    c.optim.optimizer = "adamw"
    c.optim.learning_rate = 1e-6
    c.optim.schedule = "constant"  # constant | linear | cosine, after the warm-up
    c.optim.warmup_steps = 0  # updates of a rising rate, learning_rate / warmup_steps the first
    c.optim.decay_steps = 0  # linear, cosine: updates, warm-up included, until the rate is 0
    c.optim.weight_decay = 0.0  # of matrices; norms, biases and the embedding do not decay
    c.optim.b1 = 0.9
    c.optim.b2 = 0.999
    c.optim.eps = 1e-8
    c.optim.max_grad_norm = 1.0
    c.optim.mu_dtype = ""  # of Adam's first moment: bfloat16 (half its memory) | empty: float32
    c.optim.micro_batches = 1  # rows are split into this many; the gradient is the same
    c.optim.freeze = False  # the policy stands still and the drafter alone learns (config warmup)
    # Places of a forward's row: whole sequences are packed into as few rows as hold them, which are
    # run one by one, so that a step costs what its tokens cost. At least the longest sequence, and
    # a few times that at most: attention is over the row's square. 0: rows padded to the limits.
    # Where rows are cut over devices, each runs a bin at a time.
    c.optim.token_budget = 0
    # What the backward pass makes again of each layer, to save memory: none | dots (all but the
    # products with weight matrices) | full (all)
    c.optim.remat = "none"

    c.checkpoint = config_dict.ConfigDict()
    c.checkpoint.every = 20  # steps; the last step is always saved
    c.checkpoint.keep = 2  # newest checkpoints kept

    c.log = config_dict.ConfigDict()
    c.log.tensorboard = False  # needs the [log] extra
    c.log.completions_per_step = 4  # rows of completions.jsonl per step; 0: none
    return c
