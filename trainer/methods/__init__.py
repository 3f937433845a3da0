"""Methods, one file each: its keys, what it takes from the data, its candidates, and the tables that it asks for."""

from trainer.methods.astra import Astra, Renee
from trainer.methods.dexml import Dexml
from trainer.methods.lns import Lns
from trainer.methods.ngame import Ngame, NgameM2
from trainer.methods.rae import Rae
from trainer.methods.recipe import Recipe

Recipe.KINDS = {"astra": Astra, "renee": Renee, "lns": Lns}
Recipe.KINDS |= {"dexml": Dexml, "rae": Rae, "ngame": Ngame, "ngame-m2": NgameM2}
