import asyncio
import multiprocessing
import os
import pickle
import signal
from types import SimpleNamespace

NUM_TOKENS = 5000


class Engine:
    def __init__(self, **arguments):
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        os.environ["NCCL_CUMEM_ENABLE"] = "0"
        signal.signal(signal.SIGQUIT, lambda number, frame: os.kill(os.getpid(), signal.SIGKILL))
        context = multiprocessing.get_context("spawn")
        self.schedulers = []
        for rank in range(arguments["tp_size"]):
            ours, theirs = context.Pipe()
            process = context.Process(target=self.run_scheduler_process_func, args=(arguments, rank, theirs))
            process.start()
            theirs.close()
            self.schedulers.append((process, ours))
        for _, connection in self.schedulers:
            assert connection.recv() == "ready"
        self.tokenizer_manager = TokenizerManager(self)

    def get_all_child_pids(self):
        return [process.pid for process, _ in self.schedulers]

    def ask(self, name, *values):
        """Of the first scheduler, once all have answered."""
        return self.loop.run_until_complete(self.ask_all(name, [values] * len(self.schedulers)))[0]

    async def ask_all(self, name, values):
        for (_, connection), value in zip(self.schedulers, values, strict=True):
            connection.send((name, value))
        answers = []
        for _, connection in self.schedulers:
            while not connection.poll():
                await asyncio.sleep(0.001)
            try:
                answers.append(connection.recv())
            except (EOFError, ConnectionError):
                # SGLang hears nothing either, and waits; its watch ends the process.
                await asyncio.sleep(60)
        return answers

    def generate(self, input_ids, sampling_params, return_logprob, image_data, video_data, audio_data):
        kinds = [items or [[] for _ in input_ids] for items in (image_data, video_data, audio_data)]
        media = [[item for items in of_request for item in items] for of_request in zip(*kinds, strict=True)]
        return self.ask("generate", input_ids, sampling_params, pickle.dumps(media))

    def flush_cache(self):
        self.ask("flush")
        return SimpleNamespace(success=True)

    def release_memory_occupation(self, tags):
        self.ask("release", tags)

    def resume_memory_occupation(self, tags):
        self.ask("resume", tags)

    def shutdown(self):
        for process, _ in self.schedulers:
            process.kill()
            process.join()


class TokenizerManager:
    def __init__(self, engine):
        self.engine = engine

    async def get_internal_state(self):
        return [{"memory_usage": {"token_capacity": NUM_TOKENS, "kvcache": 0.25, "graph": 0.0}}]

    async def update_weights_from_tensor(self, request):
        payloads = request.serialized_named_tensors
        await self.engine.ask_all("update_weights", [(payload, request.load_format) for payload in payloads])
        return True, "Success"
