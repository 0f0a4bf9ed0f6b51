"""What a step costs on a device: counted operations (`partition.operations`) at the rates of a profile.

`profile` is a device and its links as data; `profile_file` reads and writes it; `rates` turns counted work into seconds
(exact where measured, interpolated in utilisation, an error where nothing is known); `step` puts ranks, exchanges and
overlap together; `prompt` adds up the steps of a prompt; `quick` is the form that simulators ask ten thousand times.
"""
