"""The kernels inside SGLang, and SGLang under the lab's eye: plugin, launcher, benchmark.

`plugin` puts our kernels in SGLang's place, as one setting says; `launch` starts a server, proves that they run, and
leaves nothing behind; `bench` measures it. Every release of SGLang differs in what is hooked where: `releases` is that
table, and `contracts` what it is checked against. SGLang is imported only inside functions.
"""
