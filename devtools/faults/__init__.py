"""Faults are simulated by the thousand: one seed is one schedule of deaths, a failing disk, and bad messages.

The databases that people trust are tested so. A schedule runs a real federation of a few tiny clients in this process
(:mod:`.simulation`). Its disk (:mod:`.disk`) and its messages (:mod:`.messages`) fail as the schedule says
(:mod:`.schedule`). What happened is told as a list of events (:mod:`.story`), and shown as a page (:mod:`.tour`).
"""
